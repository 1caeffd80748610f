// Functions that Python calls.
#pragma once
#define EXPORT extern "C" __attribute__((visibility("default")))
