"""Pre-flight check: whether several machines can train together, in seconds and without PyTorch.

``run`` reads the command line. Each machine gathers ``facts`` about itself and joins the
``rendezvous`` at machine 0, which sends all facts to all machines. Then each machine connects to
every other one (``connectivity``) and sends its results to machine 0, which derives the findings
(``findings``) and sends them to all. So all machines print the same findings.
"""
