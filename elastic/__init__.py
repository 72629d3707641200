"""Who is a member: pure decisions, and the one actor that carries them out."""
