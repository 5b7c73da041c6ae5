"""Shares of devices for other pods, which run models in their own way.

A pod asks by annotations, and waits behind a scheduling gate. `request` reads it, `inventory` reads the devices of
nodes, `rules` choose a partition as the planners do, `placer` decides for all pods that wait, and `objects` says what
to write: a ConfigMap with what CUDA needs to know, and the pod, bound to its node and its gate opened. All these are
pure. `controller` watches and writes; `extender` gives the same decisions to schedulers of clusters without gates.
"""
