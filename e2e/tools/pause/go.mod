module pdcluster.io/e2e/tools/pause

go 1.26
