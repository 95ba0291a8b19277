"""The one door to what a lease gives."""
