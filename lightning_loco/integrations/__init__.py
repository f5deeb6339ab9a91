"""The strategies in training loops of other libraries than Lightning's Trainer."""
