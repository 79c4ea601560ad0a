"""The paper's numbers as data, and the tables and figures of the book."""
