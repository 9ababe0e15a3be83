/* AMX tile registers: eight registers of up to 16 rows of 64 bytes each.

   Their numbers are constants of the instructions. Unused rows and columns may hold anything: each row of a
   product depends on its own row of the first factor only, each column on its own of the second. */
#ifndef SHOAL_AMX_H
#define SHOAL_AMX_H

enum { TILE_ROWS = 16, TILE_BYTES = 64 };

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <stdint.h>

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Products in tiles 0 to 3 and first factors in 4 and 5 have n rows; second factors, in 6 and 7, have all. */
#define SHAPES_OF(n) \
    [n] = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {n, n, n, n, n, n, TILE_ROWS, TILE_ROWS}},
static const struct tile_shapes SHAPES[TILE_ROWS + 1] = {
    SHAPES_OF(1) SHAPES_OF(2) SHAPES_OF(3) SHAPES_OF(4) SHAPES_OF(5) SHAPES_OF(6) SHAPES_OF(7) SHAPES_OF(8)
    SHAPES_OF(9) SHAPES_OF(10) SHAPES_OF(11) SHAPES_OF(12) SHAPES_OF(13) SHAPES_OF(14) SHAPES_OF(15) SHAPES_OF(16)};

/* What was written to memory until now can be loaded into tiles; compilers do not know that loads read it. */
static inline void finish_writes(void) { __asm__ volatile("" ::: "memory"); }

/* Before the first use of tiles in a task, and before products with other rows. Tiles are 0 then. */
static inline void begin_tiles(int rows) {
    finish_writes();
    _tile_loadconfig(SHAPES + rows);
}

/* After the last one: no other code finds tiles in use, and the system need not save them. */
static inline void end_tiles(void) { _tile_release(); }

#else
static inline void begin_tiles(int rows) { (void)rows; }
static inline void end_tiles(void) {}
#endif

#endif
