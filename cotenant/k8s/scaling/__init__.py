"""HetSev's controllers on Kubernetes: how many instances of each model on which kind of GPU, by what Prometheus has.

`prometheus` asks its HTTP API, and `observed` reads rates, latencies and utilisation out of the answers.
"""
