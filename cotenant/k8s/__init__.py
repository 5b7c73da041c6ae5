"""Operate Cotenant on Kubernetes: a client of its API, the project's resources, and the controller that follows them.

The one place that imports lightkube, of the extra `k8s`. What decides is pure; the modules that talk to an API server
are thin. Serving never waits for an API server.
"""
