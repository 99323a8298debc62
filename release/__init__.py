"""What a release needs beside the wheel: its bill of materials, and proof that it can be built again."""
