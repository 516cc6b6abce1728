"""Conversion of text, chats, images, audio and videos to tensors."""
