"""personalpeft"""
