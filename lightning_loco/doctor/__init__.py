"""Whether several machines can train together, found out in seconds and without PyTorch.

``run`` reads the command line. Each machine collects its ``facts``; all meet at machine 0, the
``rendezvous``, which tells each who has come; each then connects to all others (``connectivity``),
and all get what all have found, from which each prints the same ``report``. ``messages`` says what
is read from a connection.
"""
