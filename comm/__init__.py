"""The ground floor: who is in the group, and how rows travel between its members."""
