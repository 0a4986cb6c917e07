"""The end-to-end suite (`make e2e`): stories in order, on one cluster with one operator."""
