"""``lightning-loco plan`` recommends a method and its settings for a cluster, within seconds.

``run`` reads the command line. ``planner`` estimates the costs of each method with the functions of
``costs/method_costs`` that the simulation uses, and chooses one; ``loss`` estimates the loss
relative to DDP; ``failures`` what failures cost; ``text`` writes the tables and the arithmetic;
``fleet`` writes files that start the chosen method. PyTorch is not imported.
"""
