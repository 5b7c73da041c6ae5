"""The NTUA thesis' exporter: the partitions of a node's GPUs, who uses them and how much, for Prometheus and for the
controller of shares.

`readings` holds what was read of the GPUs, `metrics` tells Prometheus, and `agent` reads, reports to the API, and cuts
idle GPUs as the controller asks.
"""
