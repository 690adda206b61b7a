"""What each rank of the saving job holds."""
