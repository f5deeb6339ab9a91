"""Network links between workers, as they are emulated: bandwidth, latency and jitter."""
