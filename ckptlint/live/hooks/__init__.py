"""Where live mode enters the frameworks."""
