"""What travels between the server and the clients, and what an algorithm may say about it."""
