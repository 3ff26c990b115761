"""Launcher for Kubernetes: one Indexed Job per attempt, one pod per node, with our supervisor as
PID 1.

profile.py     the operator's settings of pods (FT_POD_PROFILE)
volumes.py     files of the service that a pod sees
manifests.py   attempt + profile → Job, Service and NetworkPolicy; pure
status.py      Job + pods → state of the attempt; pure
cluster.py     requests to the cluster, and watches
placement.py   time limits of attempts without a node for all pods
kubernetes_launcher.py    the launcher
"""
