"""The cards of the bases that ship with personalpeft, as package data."""
