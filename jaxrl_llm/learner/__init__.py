"""What learns and what scores: everything that is differentiated, and what feeds it."""
