"""Network namespaces, faults and byte counters of a lab that is built on this machine."""
