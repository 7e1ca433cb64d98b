"""A virtual servo's memory and control loop."""

from __future__ import annotations

import pytest

from rlsvc.robots import feetech
from rlsvc.robots.virtual.sts3215 import RAD, Servo


def settle(servo: Servo, seconds: float = 2.0, stuck: bool = False) -> float:
    """Let an inertia without load follow the servo; its encoder at the end, steps."""
    velocity, dt = 0.0, 0.001
    encoder = servo.encoder
    for _ in range(round(seconds / dt)):
        duty = servo.tick(encoder, velocity, dt)
        if duty is not None and not stuck:
            torque = 1.91 * (duty - velocity * RAD / 5.45)
            velocity += torque / 0.03 / RAD * dt
            encoder += velocity * dt
    return encoder


def test_a_goal_is_reached_to_the_dead_zone() -> None:
    servo = Servo(1)
    servo.write(42, (2600).to_bytes(2, "little"))
    servo.write(40, b"\x01")
    assert settle(servo) == pytest.approx(2600, abs=1.5)


def test_without_torque_a_goal_moves_nothing() -> None:
    servo = Servo(1)
    servo.write(42, (2600).to_bytes(2, "little"))
    assert servo.tick(2048, 0.0, 0.001) is None


@pytest.mark.parametrize(("goal", "reached"), [(3500, 3000), (100, 1500), (0x8000 | 900, 1500)])
def test_a_goal_beyond_the_limits_stops_at_them(goal: int, reached: int) -> None:
    servo = Servo(1)
    servo.write(9, (1500).to_bytes(2, "little") + (3000).to_bytes(2, "little"))
    servo.write(42, goal.to_bytes(2, "little"))
    servo.write(40, b"\x01")
    assert settle(servo) == pytest.approx(reached, abs=1.5)


def test_the_homing_offset_is_taken_from_the_encoder() -> None:
    servo = Servo(1, encoder=2100)
    servo.write(31, (0x800 | 100).to_bytes(2, "little"))  # -100
    servo.tick(2100, 0.0, 0.001)
    assert servo.get("Present_Position") == 2200
    servo.write(31, (150).to_bytes(2, "little"))
    servo.tick(100, 0.0, 0.001)
    assert servo.get("Present_Position") == 4046  # within one turn
    servo.write(18, bytes([12 | 0x10]))
    servo.tick(100, 0.0, 0.001)
    assert servo.read(56, 2) == bytes([50, 0x80])  # -50, with its sign


def test_torque_128_makes_the_place_the_middle() -> None:
    servo = Servo(1, encoder=3000)
    servo.write(40, bytes([128]))
    servo.tick(3000, 0.0, 0.001)
    assert (servo.get("Present_Position"), servo.get("Homing_Offset"), servo.torque) == (2048, 952, False)


def test_eprom_outlives_the_power_only_where_it_was_not_locked() -> None:
    servo = Servo(1)
    servo.write(21, bytes([16]))
    servo.write(55, b"\x01")
    servo.write(23, bytes([3]))
    assert (servo.get("P_Coefficient"), servo.get("I_Coefficient")) == (16, 3)
    servo.power_on()
    assert (servo.get("P_Coefficient"), servo.get("I_Coefficient"), servo.get("Lock")) == (16, 0, 0)


def test_a_reset_brings_the_factorys_values_but_keeps_the_id() -> None:
    servo = Servo(5)
    servo.write(21, bytes([16]))
    servo.factory_reset()
    assert (servo.get("P_Coefficient"), servo.get("ID"), servo.get("Max_Position_Limit")) == (32, 5, 4095)


def test_what_is_measured_cannot_be_written() -> None:
    servo = Servo(1)
    servo.tick(2000, 0.0, 0.001)
    servo.write(55, bytes([1, 9, 9, 9, 9]))  # from Lock on into Present_Position
    assert (servo.get("Lock"), servo.get("Present_Position")) == (1, 2000)


def test_velocity_and_load_carry_their_sign() -> None:
    servo = Servo(1)
    servo.write(40, b"\x01")
    servo.write(42, (1000).to_bytes(2, "little"))
    for _ in range(200):
        servo.tick(2048, -300.0, 0.001)
    assert servo.read(58, 2) == bytes([300 & 0xFF, 0x80 | 300 >> 8])
    assert servo.get("Present_Load") < -500
    assert servo.read(61, 1)[0] & 0x04  # bit 10 of the word


def test_velocity_and_acceleration_of_the_way_are_limited() -> None:
    servo = Servo(1)
    servo.write(42, (4000).to_bytes(2, "little"))
    servo.write(46, (500).to_bytes(2, "little"))
    servo.write(40, b"\x01")
    assert settle(servo, 1.0) == pytest.approx(2048 + 500, abs=60)


def test_a_stalled_motor_falls_back_to_its_protective_torque_and_says_so() -> None:
    servo = Servo(1)
    servo.write(42, (4000).to_bytes(2, "little"))
    servo.write(40, b"\x01")
    settle(servo, 1.9, stuck=True)
    assert (servo.error, servo.get("Present_Load")) == (0, 1000)
    settle(servo, 1.2, stuck=True)
    assert (servo.error, servo.get("Present_Load")) == (feetech.OVERLOAD, 200)
    servo.write(40, b"\x01")  # a person switches it on again
    servo.tick(2048, 0.0, 0.001)
    assert servo.error == 0


def test_a_hot_motor_lets_go() -> None:
    servo = Servo(1)
    servo.write(40, b"\x01")
    servo.temperature = 75
    assert servo.tick(2048, 0.0, 0.001) is None
    assert servo.error == feetech.TEMPERATURE


def test_a_supply_outside_the_limits_lets_go_where_the_servo_is_told_so() -> None:
    servo = Servo(1)
    servo.write(40, b"\x01")
    servo.write(15, bytes([80]))  # a 12 V servo's lower limit; the supply gives 7.4 V
    assert servo.tick(2048, 0.0, 0.001) is not None
    assert servo.error == feetech.VOLTAGE
    servo.write(19, bytes([44 | feetech.VOLTAGE]))
    assert servo.tick(2048, 0.0, 0.001) is None
    assert servo.get("Status") == feetech.VOLTAGE


def test_the_torque_limit_limits_the_duty() -> None:
    servo = Servo(1)
    servo.write(48, (300).to_bytes(2, "little"))
    servo.write(42, (4000).to_bytes(2, "little"))
    servo.write(40, b"\x01")
    settle(servo, 0.5, stuck=True)
    assert servo.get("Present_Load") == 300
