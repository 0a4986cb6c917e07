"""The PDCluster API: models, names, conditions and CRD generation. Pure."""
