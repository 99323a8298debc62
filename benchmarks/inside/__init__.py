"""Maps inside a tile against labelled nuclei of the colon images, and against the model itself.

Tiles of 96 px at stride 48 are seen at 192 px. AttnMIL learns "contains epithelial nuclei" in five folds. On
strongly positive tiles of held-out images, each map is asked to tell epithelial nuclei from others (AUROC of
its value at their centres), to find the pixels whose loss hurts (deletion, insertion), and to change when
weights are redrawn. Settings are chosen on the four other folds; intervals draw images with replacement.
"""
