"""Where rows live on a rank: homes, replicas, and the one update per row and step."""
