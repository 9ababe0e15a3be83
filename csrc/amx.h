/* Tiles of AMX: eight registers of 16 rows of 64 bytes each.

   Their numbers are constants of the instructions. Rows and columns that nobody wants may hold anything: each row of a
   product depends on its own row of the first factor only, each column on its own of the second. */
#ifndef SHOAL_AMX_H
#define SHOAL_AMX_H

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <stdint.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64 };

#define EIGHT(x) {x, x, x, x, x, x, x, x}
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} WHOLE_TILES = {.palette = 1, .bytes = EIGHT(TILE_BYTES), .rows = EIGHT(TILE_ROWS)};

/* Before the first use of tiles in a task; what the task wrote to memory until then can be loaded. */
static inline void begin_tiles(void) {
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&WHOLE_TILES);
}

/* After the last one: no other code finds tiles in use, and the system need not save them. */
static inline void end_tiles(void) { _tile_release(); }
#endif

#endif
