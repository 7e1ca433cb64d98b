"""One STS3215 servo without its motor: the control table, and the loop that turns a goal into a duty cycle.

What drives it (the MuJoCo arm of so101_sim.py, or a test) calls `tick` with what the encoder sees and gets what the
bridge does. Encoder values are steps, 4096 a turn.

Known of the firmware and done here: limits, homing offset, torque switch (with 128, the middle), EPROM that keeps a
value only where it was written unlocked, acceleration and velocity of the way to the goal, P and D, torque limits,
protection against overload, heat and voltage, error bits. Not modelled: modes other than position (the motor stands),
the I coefficient, `Goal_Time`, backlash. What a real servo does when torque is switched on after it was moved by hand
is not documented; this one goes to its old goal, which is the worse case.
"""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import dataclass

from rlsvc.robots import feetech
from rlsvc.robots.feetech import decode_signed, encode_signed
from rlsvc.robots.virtual.feetech_table import EPROM_END, READ_ONLY, SIZE, STEPS, TABLE

STALL_CURRENT = 2500
"""mA."""
STALL_TORQUE = 1.91
"""N m, 19.5 kg cm at 7.4 V, 1:345 gear (Feetech STS3215-C001)."""
NO_LOAD_SPEED = 5.45
"""rad/s, 52 turns a minute at 7.4 V."""
# Duty per radian and per rad/s at the factory's coefficients of 32, from an identified model of the servo (17.8 N m/rad
# and 0.6 N m s/rad, of which the motor's back-EMF makes 0.35; Open Duck Playground, as used by SO-ARM100).
P_DUTY = 17.8 / STALL_TORQUE / 32
D_DUTY = (0.60 - STALL_TORQUE / NO_LOAD_SPEED) / STALL_TORQUE / 32
RAD = 2 * math.pi / STEPS
"""Radians of a step."""


PRESENT = struct.Struct("<HHHBBxBB")
"""Present_Position to Moving, from address 56 on."""


@dataclass(slots=True)
class Settings:
    """What the control loop reads from the control table, decoded once after a write.

    Attributes:
        on: whether torque is on, in position mode.
        offset: steps.
        turns: positions beyond one turn.
        goal: within the limits of position, steps.
        fastest: steps/s.
        acceleration: steps/s^2, 0 as fast as the motor can.
        p: duty per step.
        d: duty per step/s.
        dead: steps in which nothing is done, below and above.
        limit: of the duty.
        overload: duty that counts as overload.
        patience: of overload, s.
        protective: duty in overload.
        unload: error bits that switch something off.
        moving: steps/s that count as moving.
        voltage: lowest and highest, V.
        hottest: degrees Celsius.
    """

    on: bool
    offset: int
    turns: bool
    goal: float
    fastest: float
    acceleration: float
    p: float
    d: float
    dead: tuple[int, int]
    limit: float
    overload: float
    patience: float
    protective: float
    unload: int
    moving: float
    voltage: tuple[float, float]
    hottest: int


class Servo:
    """A servo's memory and control loop. Safe for one thread on the bus and one in physics.

    Attributes:
        encoder: what the encoder saw last, steps, without the homing offset.
        temperature: degrees Celsius.
        voltage: V.
    """

    def __init__(self, id: int, encoder: float = STEPS / 2) -> None:
        self.encoder = encoder
        self.temperature = 30
        self.voltage = 7.4
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._saved = bytearray(SIZE)
        for register in TABLE.values():
            self._put(self._saved, register.address, register.width, register.factory)
        self._saved[TABLE["ID"].address] = id
        self.power_on()

    def power_on(self) -> None:
        """EPROM as it was saved, RAM as the factory has it; torque is off and the goal is where the servo stands."""
        with self._lock:
            self._memory = bytearray(self._saved)
            self._settings = None
            self._pending: tuple[int, bytes] | None = None
            self._setpoint, self._setpoint_velocity, self._overloaded_s = self.position, 0.0, 0.0
            self._overloaded = False
            self.set("Torque_Limit", self.get("Max_Torque_Limit"))
            self.set("Goal_Position", round(self.position))
            self.set("Present_Position", round(self.position))

    def factory_reset(self) -> None:
        """The control table as the factory has it, but for the ID."""
        with self._lock:
            kept = self.get("ID")
            for register in TABLE.values():
                self._put(self._saved, register.address, register.width, register.factory)
            self._saved[TABLE["ID"].address] = kept
            self.power_on()

    @property
    def position(self) -> float:
        """What `Present_Position` says, steps: the encoder less the homing offset, within one turn."""
        raw = self.encoder - self.get("Homing_Offset")
        return raw if self.get("Phase") & 0x10 else raw % STEPS

    @property
    def torque(self) -> bool:
        """Whether the motor is switched on."""
        return self.get("Torque_Enable") == 1

    def get(self, name: str) -> int:
        """A register's value, with its sign."""
        address, width, _, _, sign = TABLE[name]
        word = int.from_bytes(self._memory[address : address + width], "little")
        return word if sign is None else decode_signed(word, sign)

    def set(self, name: str, value: int) -> None:
        """Set a register, read-only ones too; for EPROM this is not what a write over the bus would save."""
        address, width, _, _, sign = TABLE[name]
        self._put(self._memory, address, width, value if sign is None else encode_signed(value, sign))
        self._settings = None

    def save(self) -> None:
        """Keep EPROM as it is now over `power_on`."""
        self._saved[:EPROM_END] = self._memory[:EPROM_END]

    # What the bus asks for.

    def read(self, address: int, count: int) -> bytes:
        """Bytes of the table; those beyond its end are 0."""
        with self._lock:
            return bytes(self._memory[address : address + count]).ljust(count, b"\0")

    def write(self, address: int, data: bytes) -> None:
        """Write over the bus: read-only bytes stay, EPROM is saved where it is not locked, torque is switched."""
        with self._lock:
            for at, byte in enumerate(data, address):
                if at < SIZE and at not in READ_ONLY:
                    self._memory[at] = byte
                    if at < EPROM_END and not self.get("Lock"):
                        self._saved[at] = byte
            self._settings = None
            if address <= feetech.TORQUE_ENABLE[0] < address + len(data):
                self._switch()

    def register_write(self, address: int, data: bytes) -> None:
        """Keep a write until `action`."""
        self._pending = (address, data)

    def action(self) -> None:
        """Carry out the write that was kept, once."""
        if self._pending is not None:
            self.write(*self._pending)
            self._pending = None

    def _switch(self) -> None:
        if self.get("Torque_Enable") == 128:
            self.set("Torque_Enable", 0)
            offset = round(self.encoder) - STEPS // 2
            self.write(TABLE["Homing_Offset"].address, encode_signed(offset, 11).to_bytes(2, "little"))
        self._overloaded, self._overloaded_s = False, 0.0

    @property
    def error(self) -> int:
        """Error bits of every reply."""
        return self._error(self._settings or self._decode())

    def _error(self, now: Settings) -> int:
        return (
            (not now.voltage[0] <= self.voltage <= now.voltage[1]) * feetech.VOLTAGE
            | (self.temperature > now.hottest) * feetech.TEMPERATURE
            | self._overloaded * feetech.OVERLOAD
        )

    # What physics asks for.

    def tick(self, encoder: float, velocity: float, dt: float) -> float | None:
        """One step of the control loop.

        Args:
            encoder: where the shaft is, steps, unbounded.
            velocity: steps/s.
            dt: since the last call, s.

        Returns:
            Duty cycle of the bridge in [-1, 1], or None where it is open and the shaft turns freely.
        """
        with self._lock:
            now = self._settings or self._decode()
            self.encoder = encoder
            position = encoder - now.offset
            if not now.turns:
                position %= STEPS
            error = self._error(now)
            if not now.on or error & now.unload & (feetech.TEMPERATURE | feetech.VOLTAGE):
                duty = None
                self._setpoint, self._setpoint_velocity = position, 0.0
            else:
                duty = self._control(now, position, velocity, dt)
            shown = round(position) if now.turns else round(position) % STEPS
            used = abs(duty or 0.0)
            PRESENT.pack_into(
                self._memory,
                TABLE["Present_Position"].address,
                encode_signed(shown, 15),
                encode_signed(round(velocity), 15),
                encode_signed(round(1000 * (duty or 0.0)), 10),
                min(255, round(self.voltage * 10)),
                min(255, round(self.temperature)),
                error,
                abs(velocity) > now.moving,
            )
            self._put(self._memory, 69, 2, round(used * STALL_CURRENT / 6.5))
            return duty

    def _decode(self) -> Settings:
        get = self.get
        low, high = get("Min_Position_Limit"), get("Max_Position_Limit")
        goal = get("Goal_Position")
        limit = min(get("Torque_Limit"), get("Max_Torque_Limit")) / 1000
        self._settings = Settings(
            on=self.torque and get("Operating_Mode") == 0,
            offset=get("Homing_Offset"),
            turns=bool(get("Phase") & 0x10),
            goal=goal if (low, high) == (0, 0) else max(low, min(high, goal)),  # both 0: many turns
            fastest=abs(get("Goal_Velocity")) or NO_LOAD_SPEED / RAD,
            acceleration=100.0 * get("Acceleration"),
            p=RAD * P_DUTY * get("P_Coefficient"),
            d=RAD * D_DUTY * get("D_Coefficient"),
            dead=(-get("CCW_Dead_Zone"), get("CW_Dead_Zone")),
            limit=limit,
            overload=min(limit, get("Overload_Torque") / 100),
            patience=get("Protection_Time") / 100,
            protective=min(limit, get("Protective_Torque") / 100),
            unload=get("Unloading_Condition"),
            moving=50.0 * get("Moving_Velocity_Threshold"),
            voltage=(get("Min_Voltage_Limit") / 10, get("Max_Voltage_Limit") / 10),
            hottest=get("Max_Temperature_Limit"),
        )
        return self._settings

    def _control(self, now: Settings, position: float, velocity: float, dt: float) -> float:
        self._advance(now, dt)
        error = self._setpoint - position
        if now.dead[0] <= error <= now.dead[1]:
            error = 0.0
        duty = max(-now.limit, min(now.limit, now.p * error - now.d * velocity))
        if abs(duty) < now.overload:
            self._overloaded, self._overloaded_s = False, 0.0
            return duty
        self._overloaded_s += dt
        self._overloaded |= self._overloaded_s >= now.patience and bool(now.unload & feetech.OVERLOAD)
        return max(-now.protective, min(now.protective, duty)) if self._overloaded else duty

    def _advance(self, now: Settings, dt: float) -> None:
        """Move the setpoint towards the goal, within the limits of velocity and acceleration."""
        way = now.goal - self._setpoint
        if now.acceleration:
            wanted = math.copysign(min(now.fastest, math.sqrt(2 * now.acceleration * abs(way))), way)
            change = now.acceleration * dt
            self._setpoint_velocity += max(-change, min(change, wanted - self._setpoint_velocity))
        else:
            self._setpoint_velocity = math.copysign(now.fastest, way)
        step = self._setpoint_velocity * dt
        if abs(step) >= abs(way) and step * way >= 0:
            self._setpoint, self._setpoint_velocity = float(now.goal), 0.0
        else:
            self._setpoint += step

    @staticmethod
    def _put(memory: bytearray, address: int, width: int, value: int) -> None:
        memory[address : address + width] = value.to_bytes(width, "little")
