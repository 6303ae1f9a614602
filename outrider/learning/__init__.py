"""Small tools for learning from observations: agreement, means, bounded stores, delays and outboxes."""
