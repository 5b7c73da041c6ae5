"""Account for shares of devices by Dynamic Resource Allocation (resource.k8s.io/v1).

On each node a driver publishes the devices in a ResourceSlice, each with 1000 thousandths and its memory to consume,
and prepares for the kubelet the claims that the scheduler has allocated: a container gets its device and the limits of
its share by CDI. Beside it, placements that the controller has decided become ResourceClaims, so that the scheduler
takes them into account.
"""
