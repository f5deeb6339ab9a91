"""The commands of ``lightning-loco``: plan, doctor, report, topology and others."""
