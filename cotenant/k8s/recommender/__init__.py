"""The NTUA thesis' recommender as a service: what models reach alone, and lose beside each other, over gRPC.

`matrices` learns and predicts, and is pure. `state` keeps what was measured, in a ConfigMap or in Redis. `service`
answers over gRPC, and `client` follows such a service.
"""
