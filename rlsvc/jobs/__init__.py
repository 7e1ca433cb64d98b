"""Jobs: sent from a light install (client, package, sent), run on the cluster (run, queue, record), or by KubeRay."""
