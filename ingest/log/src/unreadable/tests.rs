use std::io::{Read, Write};
use std::net::TcpStream;

use futures::StreamExt as _;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

use rdkafka::Message as _;

use super::*;
use crate::{Announcement, Producer, announcements};

const TOPIC: &str = "t";
/// zstd has the last number; a library that lacks a codec sees any number like this.
const UNKNOWN_CODEC: u16 = 7;
const GZIP: u16 = 1;
const POLL_EVERY: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(60);

/// Kafka's CRC-32C.
fn crc32c(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 * (crc & 1)))
    });
    !crc
}

/// A batch of records with one-byte values, in the format of Kafka's log (version 2).
fn batch(records: u8, codec: u16) -> Vec<u8> {
    // Length 7 as a zigzag varint, attributes, time, offset, no key, one byte, no headers.
    let lines = (0..records).flat_map(|record| [14, 0, 0, record * 2, 1, 2, b'x', 0]);
    batch_of(records, &lines.collect::<Vec<_>>(), codec)
}

fn batch_of(records: u8, lines: &[u8], codec: u16) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(codec.to_be_bytes());
    body.extend((i32::from(records) - 1).to_be_bytes());
    body.extend([0; 16]);
    body.extend([0xff; 14]);
    body.extend(i32::from(records).to_be_bytes());
    body.extend(lines);
    let crc = crc32c(&body);
    let mut batch = Vec::new();
    batch.extend(0i64.to_be_bytes());
    batch.extend((i32::try_from(body.len()).unwrap() + 9).to_be_bytes());
    batch.extend(0i32.to_be_bytes());
    batch.push(2);
    batch.extend(crc.to_be_bytes());
    batch.extend(body);
    batch
}

/// Sends batches as they are, without the library: a `Produce` request, version 3.
fn produce(brokers: &str, topic: &str, batches: &[Vec<u8>]) {
    let mut stream = TcpStream::connect(brokers).unwrap();
    for batch in batches {
        let mut request = Vec::new();
        request.extend([0, 0, 0, 3, 0, 0, 0, 1, 0, 1, b'c']);
        request.extend([0xff, 0xff, 0, 1]);
        request.extend(5000i32.to_be_bytes());
        request.extend([0, 0, 0, 1]);
        request.extend(u16::try_from(topic.len()).unwrap().to_be_bytes());
        request.extend(topic.as_bytes());
        request.extend([0, 0, 0, 1, 0, 0, 0, 0]);
        request.extend(i32::try_from(batch.len()).unwrap().to_be_bytes());
        request.extend(batch);
        stream
            .write_all(&i32::try_from(request.len()).unwrap().to_be_bytes())
            .unwrap();
        stream.write_all(&request).unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut answer).unwrap();
    }
}

fn cluster(batches: &[Vec<u8>]) -> (MockCluster<'static, DefaultProducerContext>, ClientOptions) {
    cluster_of(TOPIC, batches)
}

fn cluster_of(topic: &str, batches: &[Vec<u8>]) -> (MockCluster<'static, DefaultProducerContext>, ClientOptions) {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic(topic, 1, 1).unwrap();
    let options = ClientOptions {
        brokers: cluster.bootstrap_servers(),
        ..ClientOptions::default()
    };
    produce(&options.brokers, topic, batches);
    (cluster, options)
}

/// What cannot be read from `position`: its first offset, and the one after its last.
fn unreadable(options: &ClientOptions, position: i64) -> Option<(i64, i64)> {
    let positions = BTreeMap::from([((TOPIC.to_owned(), 0), position)]);
    let found = find(options, &[], &positions).unwrap();
    let [batch] = &*found else {
        assert!(found.is_empty());
        return None;
    };
    assert!(!batch.why.is_empty());
    Some((batch.first, batch.next))
}

#[test]
fn exactly_the_batch_that_cannot_be_read_is_given_up() {
    // Offsets: 0–1 good, 2–12 of an unknown codec, 13 good, 14–16 and 17–21 unknown, 22 good.
    let unknown = |records| batch(records, UNKNOWN_CODEC);
    let good = |records| batch(records, 0);
    let (_cluster, options) = cluster(&[good(2), unknown(11), good(1), unknown(3), unknown(5), good(1)]);
    assert_eq!(unreadable(&options, 0), None);
    assert_eq!(unreadable(&options, 2), Some((2, 13)));
    // A reader that was stopped within the batch.
    assert_eq!(unreadable(&options, 7), Some((7, 13)));
    assert_eq!(unreadable(&options, 13), None);
    // The next one cannot be read either, and is another.
    assert_eq!(unreadable(&options, 14), Some((14, 17)));
    assert_eq!(unreadable(&options, 17), Some((17, 22)));
    assert_eq!(unreadable(&options, 22), None);
    assert_eq!(unreadable(&options, 23), None, "the end");
}

#[test]
fn damaged_batches_are_found_by_what_is_compressed() {
    let (_cluster, options) = cluster(&[batch(3, GZIP), batch(1, 0), batch(4, GZIP)]);
    assert_eq!(unreadable(&options, 0), Some((0, 3)));
    assert_eq!(unreadable(&options, 3), None);
    assert_eq!(unreadable(&options, 4), Some((4, 8)), "the end of the partition");
}

#[test]
fn this_build_reads_every_codec_that_kafka_has() {
    let (_cluster, options) = cluster(&[]);
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let config = options.config(&[("compression.type", codec)]);
        let created: Result<rdkafka::producer::BaseProducer, _> = config.create();
        assert!(created.is_ok(), "{codec}: {:?}", created.err());
    }
}

#[test]
fn a_header_whose_name_is_not_text_does_not_stop_the_reader() {
    // A header with the name ff and the value v, then one that is read.
    let headers = [4, 2, 0xff, 2, b'v', 24];
    let mut line = vec![0, 0, 0, 1, 2, b'x'];
    line.extend(headers);
    line.extend(b"content-type");
    line.push(20);
    line.extend(b"text/plain");
    line.insert(0, u8::try_from(line.len() * 2).unwrap());
    let (_cluster, options) = cluster(&[batch_of(1, &line, 0)]);
    let consumer: BaseConsumer = options.config(SETTINGS).create().unwrap();
    let mut start = TopicPartitionList::new();
    start.add_partition_offset(TOPIC, 0, Offset::Beginning).unwrap();
    consumer.assign(&start).unwrap();
    let message = consumer.poll(READ_TIMEOUT).unwrap().unwrap();
    assert_eq!(message.payload(), Some(&b"x"[..]));
    let read: Vec<_> = kafka::headers(&message).collect();
    assert_eq!(read, [("content-type", "text/plain")]);
}

#[tokio::test]
async fn announcements_go_on_behind_what_cannot_be_read() {
    let topic = ClientOptions::default().topics().version;
    let (_cluster, options) = cluster_of(&topic, &[]);
    let mut received = announcements::subscribe(&options).await.unwrap();
    produce(&options.brokers, &topic, &[batch(2, UNKNOWN_CODEC)]);
    let producer = Producer::new(&options).unwrap();
    let announcement = Announcement::default();
    let sent_until_received = async {
        loop {
            producer.send_announcement(&announcement).await.unwrap();
            if let Ok(Some(received)) = tokio::time::timeout(POLL_EVERY, received.next()).await {
                return received;
            }
        }
    };
    let received = tokio::time::timeout(PATIENCE, sent_until_received).await;
    assert_eq!(received.unwrap(), announcement);
}
