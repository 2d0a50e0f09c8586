"""An ordinary PyTorch training script: one process, no accel. five_lines.py is the same with accel."""

import torch
import torch.nn.functional as F
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16  # (1797, 64)
train_set, test_set = random_split(TensorDataset(images, torch.tensor(digits.target)), [1438, 359])
train_data = DataLoader(train_set, batch_size=32, shuffle=True)
test_data = DataLoader(test_set, batch_size=32)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for _ in range(15):
    for x, y in train_data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

num_correct = num_images = 0
for x, y in test_data:
    predicted = model(x).argmax(dim=1)
    num_correct += int((predicted == y).sum())
    num_images += len(y)
print(f"loss {loss.item():.6f}, test accuracy {num_correct / num_images:.4f} on {num_images} images")
