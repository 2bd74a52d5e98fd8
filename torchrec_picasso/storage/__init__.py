"""Storage of rows on a rank: home rows, replicas, and the single update per row and step."""
