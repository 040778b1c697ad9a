"""What megarl init writes, besides this file."""
