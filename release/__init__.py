"""What a release needs beside the wheel: its bill, the offline bundle, lowest versions, the wheel again."""
