"""``lightning-loco plan``: which method and settings suit a cluster, within seconds.

``run`` reads the command line. ``planner`` estimates what each method costs on the cluster, with
the functions of ``costs/method_costs`` that the simulation uses, and chooses; ``loss`` says how
much higher the loss is expected to be than DDP's; ``text`` makes the tables and the arithmetic.
PyTorch is not imported.
"""
