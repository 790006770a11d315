"""Adapters that put flash_ext into other libraries. Import the one you need: nothing is imported here."""
