"""How work is divided over ranks: batch arithmetic and agreement between ranks."""
