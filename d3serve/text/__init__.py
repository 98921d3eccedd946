"""Text from outside: JSON read strictly, and in which words it is said what is wrong with a value."""
