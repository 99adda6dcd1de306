"""How far products are from exact, by precision, on data that are easy and on data that are hard."""
