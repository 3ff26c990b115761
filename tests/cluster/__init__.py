"""A Kubernetes cluster for tests: an API server that keeps state, the controllers that Jobs need,
and a node whose pods are processes of this host.

    apiserver.py     REST with versions, conflicts, watches, selectors, graceful deletion and roles
    controllers.py   Indexed Jobs, scheduling, garbage collection
    kueue.py         a queue as Kueue's, where a test asks for one
    plane.py         what it takes to use a control plane of somebody else's
    kubelet.py       runs pods as processes; speaks HTTP only, so it also serves as a node of a real
    control plane harness.py       what the tests use: this cluster, or the one that KUBECONFIG
    names
"""
