"""Whether several machines can train together, found out in seconds and without PyTorch.

Words of this room: a *machine* is one of those that take part, and runs the doctor once; machine 0
holds the *meeting* at the master's address, where all others come to as they would come to
PyTorch's key-value store. Each machine tells its *facts*, opens a *door* where gloo or NCCL would
listen, and tries the doors of all others; a *contact* is what came of one. The *road* is the
interface by which a machine reaches machine 0. A *finding* is what comes of one check, with the
mend.

The way of a run: ``run``, ``place`` (which machine is this), ``facts`` with ``interfaces`` and
``addresses`` (what is here), ``visit`` (coming to the meeting), ``contacts`` (trying the doors),
``verdict`` with ``findings`` and ``roads`` (what it all means), ``report``. ``meeting`` and
``doors`` are what others find when they come, ``messages`` what is said there.
"""
