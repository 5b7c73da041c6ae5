"""Read published measurements that only experiments use; `cotenant.published` has the others."""
