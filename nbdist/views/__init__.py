"""What is drawn of a cluster."""
