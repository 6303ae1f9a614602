"""Small tools of everything that learns: agreement, means, stores of bounded size, delays and outboxes."""
