"""Environments: what the policy talks to in episodes of several turns. A config names a class of a module here."""
