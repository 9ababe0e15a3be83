/* Addresses of the inputs of a part of a tile. */
#ifndef SHOAL_INPUTS_H
#define SHOAL_INPUTS_H

#include <stdint.h>

/* The first row's first group, and the bytes from a row or group to the next. */
struct inputs {
    const char *first;
    int64_t row, group;
};

#endif
