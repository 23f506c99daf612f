"""Ground services that everything above stands on: settings, storage, the Temporal client, telemetry.

Beside the Python modules lie `environments/` (the pinned dependencies of the three environments) and, for a cluster, manifests.
"""
